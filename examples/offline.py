"""Collect calibration sums on the machine with the model, and solve on another one without torch."""

import subprocess
import sys

import loopq

# On the machine with the model and its GPU. --metric loop also keeps the sums of the gradients.
collect = ["collect", "huginn_small", "--out", "dump", "--hessian", "--metric", "loop", "--n-prompts", "4"]
subprocess.run([sys.executable, "-m", "loopq", *collect], check=True)

# On any other machine, from the folder `dump` alone.
solved = loopq.solve("dump", out="solved", bits=3, group_size=32)
assert "torch" not in sys.modules

for name, layer in solved.layers.items():
    print(f"{name:40} {layer.report['method_done']}, {layer.n_bytes} bytes")
