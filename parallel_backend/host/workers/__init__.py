"""Worker processes: started or joined, talked to, watched, and what is known of their failures."""
