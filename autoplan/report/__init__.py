"""Results for people: terminal tables, drawings, the HTML page."""
