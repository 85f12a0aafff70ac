"""`openrlhf dpo`: preference optimisation on pairs, DPO and its relatives."""

from openrlhf.cli.runner import supervised

main = supervised("dpo")

if __name__ == "__main__":
    main()
