"""`openrlhf doctor`: versions, GPUs, memory, limits, folders, and the nodes of a Ray cluster.

Exit code 0: all is fine; 2: every line on stderr says what to type.
"""

from openrlhf.cli.runner import Command, imported
from openrlhf.config.serving import DoctorConfig

main = Command("openrlhf doctor", DoctorConfig, imported("openrlhf.commands.doctor:run_doctor"))

if __name__ == "__main__":
    main()
