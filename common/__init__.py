"""What every part may use: errors for people, statistics, tables, processes and ranks. Nothing here knows a model."""
