"""`python -m evenstep.demo`."""

from evenstep.demo.run import main

if __name__ == "__main__":
    main()
