"""Programs compiled for devices that are not attached: memory, time and traffic as reported by the compiler."""
