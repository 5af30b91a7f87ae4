"""Logs of MLPerf training, whichever framework ran."""
