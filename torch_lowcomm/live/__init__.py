"""A run while it lives: the page in torch's debug server, figures for Prometheus, TensorBoard and W&B."""
