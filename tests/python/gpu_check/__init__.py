"""`make gpu-check`: whether everything that is meant for a GPU works on the one that is here.

Two ranks share the GPU, over loopback, and do every op, hook and optimizer next to the same on the host, whose bits
they must have (`stages/`); around that stand the kernels' own tests, compute-sanitizer and the benchmark (`steps.py`).
`--device cpu` performs the stages without a GPU: what a test does on every machine.
"""
