"""Seconds of a training step on slow links: a data parallel model, compressed, next to the ways people have without lowcomm.

python benchmarks steps ddp --rate 100mbit          # as root; benchmarks/results/steps.md
"""
