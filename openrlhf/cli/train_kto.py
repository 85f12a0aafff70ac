"""`openrlhf kto`: preference optimisation on single good and bad responses."""

from openrlhf.cli.runner import supervised

main = supervised("kto")

if __name__ == "__main__":
    main()
