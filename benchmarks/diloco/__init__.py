"""Outer loops on slow links next to torchft's: speed, exposed communication, bytes and loss of one and the same setting.

python benchmarks diloco_lab          # as root; benchmarks/results/diloco_lab.md
"""
