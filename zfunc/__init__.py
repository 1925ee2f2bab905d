"""ZeRO-3 as a function transformation: pure, sharded training steps for PyTorch."""
