"""Models: find one by name, and describe it as a profile with tapes.

`resolve.resolve` finds a model in the catalog, on disk, on the hub or as a bare parameter count, and returns it as a
`resolved.Resolved`. `catalog` lists the known models. `profile.Profile` and `tape.Tape` are the data that every estimate reads.
`recorders` imports `recording` (and with it torch) only when a model must be recorded.
"""
