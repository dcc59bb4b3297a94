"""Tools that training never imports: planning, preflight, lab, qualification, corpora, conversion and reports."""
