"""How a job's ranks are arranged (the mesh), and which part of each parameter a rank keeps (the placement)."""
