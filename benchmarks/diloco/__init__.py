"""The cost of lc.DiLoCoX on slow links: speed, bytes, waiting and memory, next to torchft's DiLoCo.

python benchmarks diloco --rate 100mbit 10mbit          # as root; benchmarks/results/diloco_speed.md
"""
