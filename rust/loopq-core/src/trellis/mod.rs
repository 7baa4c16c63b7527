//! Finds codes on a bitshift trellis ([`crate::grid::Trellis`]) under `tr(A D S D^T)`.
//!
//! | file | what |
//! |---|---|
//! | `coupled` | state of each path where rows are coupled |
//! | `paths` | the best path into every node of the trellis, taken through a row |
//! | `row` | one row, and how many others are coupled with it |
//! | `search` | the nearest stream to one column, its rows coupled by `A` |
//! | `solve` | column after column, each making up for those before; then the scales |

mod coupled;
mod paths;
mod row;
mod search;
mod solve;

pub use solve::{solve, TrellisReport};
