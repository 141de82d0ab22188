"""The program of a training step: what an engine allocates, computes, sends and waits for, in order.

An engine builds it once (`build_program`); live memory, the caching allocator and the timeline are three readers of it. A
program does not depend on the micro-batch B and the sequence length T: sizes that do are polynomials, evaluated by a reader.
"""
