"""Reports of runs: a self-contained HTML page, or a card in Markdown."""
