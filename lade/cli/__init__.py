"""The shell: one module or package per command; none imports torch before it runs."""
