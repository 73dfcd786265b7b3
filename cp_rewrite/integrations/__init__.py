"""`parallelize`, and trainers of other libraries: `transformers.py` and `trl.py`, which nothing else imports."""
