"""Programs compiled for chips that are not here: what the compiler says of memory, time and traffic."""
