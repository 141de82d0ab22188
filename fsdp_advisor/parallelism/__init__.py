"""The arrangement of a job's ranks (`mesh.Mesh`) and the part of each parameter that a rank keeps (`placement`).

Imports nothing from the rest of the package.
"""
