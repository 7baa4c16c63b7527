//! `H_t = X_t^T X_t`, summed over rows so that the result does not depend on how the rows arrive.
//!
//! `docs/formats/hessian.md` is the specification. In short, the rows of one step form one sequence, cut into blocks of
//! [`BLOCK_ROWS`] from its first row. The products of a block are summed in float32. Each block's sum is then added to
//! a fixed-point number on a grid of `2^-60`. Integer addition is associative, so order, threads, shards and merging
//! cannot change a bit. The sum over `t` of `H_t` is `H` exactly.

mod accumulate;
mod bf16;
mod limbs;
mod matrix;
mod merge;
mod packed;
mod read;
mod rows;
mod state;
mod tiles;

pub use accumulate::{Accumulator, Settings};
pub use state::{MatrixState, State, SPEC_VERSION};

/// Rows in a block: their products are summed in float32 before they reach the exact grid.
pub const BLOCK_ROWS: usize = 512;

/// Columns of a packed panel, and side of the square in which entries are stored.
const PANEL: usize = 48;

/// Entries of such a square.
const SQUARE: usize = PANEL * PANEL;

/// Largest magnitude of a row entry: `BLOCK_ROWS` squares of it stay within the range of one block's sum.
pub const ROW_LIMIT: f64 = 134_217_728.0;

/// Largest entry of a Hessian: half the range of the grid, so that float32 rounding cannot reach its end.
pub const SUM_LIMIT: f64 = 18_446_744_073_709_551_616.0;
