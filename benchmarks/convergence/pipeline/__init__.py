"""AQ-SGD in a pipeline of real processes, against exact messages and against codes without a memory."""
