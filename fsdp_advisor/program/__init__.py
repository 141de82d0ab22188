"""The program of a training step: the ordered instructions with which an engine allocates, computes, communicates and waits.

`builder.build_program` builds it from a tape and an engine's hooks. It has three readers: live memory, the caching allocator and
the timeline. A program does not depend on the micro-batch B and the sequence length T: sizes that do are polynomials, which a
reader evaluates.
"""
