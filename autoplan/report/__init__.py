"""Results for people: tables on a terminal."""
