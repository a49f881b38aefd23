"""Flow matching as pure functions: path, times, grids, and solvers that see only `predict(z, t)`."""
