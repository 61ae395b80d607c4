"""What an outer loop costs and saves on slow links: speed, bytes, waiting, memory, beside torchft's.

python benchmarks/outer --rate 100mbit 10mbit          # as root; benchmarks/results/outer.md
"""
