"""Seconds a training step takes on slow links: a model's data parallel step, compressed, beside what people use else.

python benchmarks steps ddp --rate 100mbit          # as root; benchmarks/results/steps.md
"""
