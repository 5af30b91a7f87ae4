"""One self-contained HTML page of a search: a file for every section, and the style and scripts that go into it."""
