"""One node of the graph: it is run, and the ATen ops below it are watched."""
