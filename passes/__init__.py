"""The passes over a captured graph, in order. Import as `cp_rewrite.passes` only."""

if __name__ != "cp_rewrite.passes":
    raise ImportError(
        f"import this package as cp_rewrite.passes, not as {__name__}: a second copy would register twice"
    )
