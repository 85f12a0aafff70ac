"""`openrlhf kd`: knowledge distillation."""

from openrlhf.cli.runner import supervised

main = supervised("kd")

if __name__ == "__main__":
    main()
