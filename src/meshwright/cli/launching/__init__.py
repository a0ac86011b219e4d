"""What `meshwright launch` is made of: the processes of one host, and the hosts of one run."""
