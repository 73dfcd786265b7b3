"""Trainers of other libraries, context-parallel: `transformers.py` and `trl.py`. Nothing else imports them."""
