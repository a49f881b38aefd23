"""Flow matching as pure functions: path, times, grids, solvers that see only `predict(z, t)`, and Algorithm 2 on top."""
