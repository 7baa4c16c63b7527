"""The core's solvers in torch: the same algorithms on any device, for many rows of many layers at once.

| file | twin of |
| --- | --- |
| `grid` | grid/: values of codes, types of scales, the search for scales |
| `factor` | factor/: the damped Hessian, its order of columns and its factor |
| `sweep` | gptq/: one code a column |
| `beam` | gptq/beam: several paths of codes |
| `descent` | coordinate/descent: codes and scales one at a time |
| `settle` | coordinate/settle: all stages in turn |
| `coupled` | coordinate/coupled: the same under a metric between outputs |
| `solve` | from problems to layers |

The first dimension L of every tensor is the input. Layers that share S share an input. Rows follow, then columns.
As in the core, factors, gradients, errors and losses are in double precision. Paths of a beam are in single precision.
"""
