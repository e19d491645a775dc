"""Whether this machine can run what it is meant for: versions, builds, devices, and the command that mends each gap."""
