"""Tables, figures and files made from results; nothing here computes one."""
