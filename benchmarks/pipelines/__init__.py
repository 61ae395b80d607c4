"""Seconds a pipeline's step takes on slow links, next to torch's own stages and to the least that the schedule allows.

python benchmarks pipelines [--quick]               # as root; benchmarks/results/pipelines.md
"""
