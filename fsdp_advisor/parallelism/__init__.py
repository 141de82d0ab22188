"""The arrangement of a job's ranks (`mesh.Mesh`). Imports nothing from the rest of the package."""
