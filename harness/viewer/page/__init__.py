"""The page of a run or of a server: its markup, style and script, and the data that the script reads."""
