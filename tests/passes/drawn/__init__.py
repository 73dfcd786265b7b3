"""Masks drawn by the thousand, right ones changed in some places: what is accepted must equal brute force.

    python -m tests.passes.drawn --kind trees --form flex --masks 10000 --processes 32

prints how many were accepted, refused and wrong. Masks are read without Dynamo: their ATen calls are written down while
they run on small tensors (`read`). `test_drawn_masks.py` shows that this reads them as a captured graph does.
"""
