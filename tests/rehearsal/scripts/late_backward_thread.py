"""A script whose backward's context is dropped by another thread, half a second after the script's end. Prints when it is."""

import threading
import time

import torch

held = []


def drop_late():
    time.sleep(0.5)
    held.clear()
    print('FOUND {"dropped": true}', flush=True)


x = torch.ones(4, device="cuda", requires_grad=True)
y = x * 2
y.register_hook(lambda grad: held.append(torch._C._get_obj_in_tls("context")))
y.sum().backward()
assert len(held) == 1
threading.Thread(target=drop_late, daemon=True).start()
