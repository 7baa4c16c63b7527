//! Bit layouts of stored codes.

pub mod dense;
pub mod marlin;
pub mod w4;
