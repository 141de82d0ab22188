"""Answers the one question that training code asks of data on the device, where no kernel has written any.

transformers looks in position ids for sequences that are packed together: ids made by kernels that do nothing would look so.
"""

import importlib.abc
import importlib.machinery
import sys

MODULE = "transformers.masking_utils"


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            asked = module.find_packed_sequence_indices

            def find_packed_sequence_indices(position_ids):
                mask = asked(position_ids)  # makes and drops what it makes on a GPU
                return None if position_ids.is_cuda else mask

            module.find_packed_sequence_indices = find_packed_sequence_indices

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
