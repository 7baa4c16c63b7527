//! Factorisations of `H`.
//!
//! When a solver rounds a column, it compensates the error in the columns to come. The best compensation is one matrix
//! `A`, unit upper triangular, with `S = H + diag(mu) = A diag(p) A^T`. GPTQ computes this factorisation (J. Chee et
//! al., *QuIP*, 2023, arXiv:2307.13304). It comes from a Cholesky factorisation with reversed indices; only the search
//! for an order forms an inverse.
//!
//! | file | what it does |
//! |---|---|
//! | `panels` | how a triangle lies in memory |
//! | `cholesky` | `S = R R^T`, `R` upper, in place; also with signs |
//! | `ldl` | `S = A diag(p) A^T`, and solving with it |
//! | `inverse` | `S^-1` from it |
//! | `ordering` | in which order columns are taken |
//! | `damped` | the object that solvers share: damping, order, factor |
//! | `lanczos` | the largest eigenvalue |
//! | `count` | how many eigenvalues lie above a bound |
//! | `eigen` | all eigenvalues |

mod cholesky;
mod count;
mod damped;
mod eigen;
mod inverse;
mod lanczos;
mod ldl;
mod ordering;
mod panels;
mod symmetric;

pub use count::{count_above, Counts};
pub(crate) use damped::Square;
pub use damped::{DampedFactor, DampedHessian};
pub use eigen::eigvalsh;
pub use ordering::{Order, PIVOTS};
pub(crate) use panels::PANEL_WIDTH;
pub use symmetric::Symmetric;
