"""`openrlhf prm`: process reward model."""

from openrlhf.cli.runner import supervised

main = supervised("prm")

if __name__ == "__main__":
    main()
