//! Every way in which the core refuses: one variant, one cause, one message.

use std::path::PathBuf;

/// Result of a core operation.
pub type Result<T> = std::result::Result<T, Error>;

/// Which class of caller-visible error a variant belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A setting or a shape is not allowed.
    Config,
    /// NaN or infinity where numbers are needed.
    NonFinite,
    /// A file or a saved state does not hold what it should.
    Dump,
    /// The arithmetic of a layer cannot be carried out.
    Solve,
    /// Somebody asked the work to stop.
    Interrupted,
}

/// A refusal of the core, with everything a message needs.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// A setting outside its allowed values.
    #[error("{name} = {got} is not allowed; allowed: {allowed}")]
    Setting {
        /// The setting's name.
        name: &'static str,
        /// The value that was given.
        got: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// Two arrays, or an array and a number, do not fit together.
    #[error("{what}: expected {expected}, got {got}")]
    Shape {
        /// What was looked at.
        what: &'static str,
        /// The shape or length that was expected.
        expected: String,
        /// The shape or length that came.
        got: String,
    },
    /// A product of sizes does not fit in memory's address range.
    #[error("the size of {what} overflows: {detail}")]
    TooLarge {
        /// What was to be allocated or addressed.
        what: &'static str,
        /// The numbers that were multiplied.
        detail: String,
    },
    /// NaN or infinity in an input row of a Hessian.
    #[error("input rows hold {value} at step {step}, row {row} (counted from the step's first row), column {column}; \
             find the module that produced it, or leave that prompt out of the calibration set")]
    NonFiniteRow {
        /// The loop step.
        step: usize,
        /// Row within the step, counted from its first row ever.
        row: u64,
        /// Column (input channel).
        column: usize,
        /// `NaN`, `inf` or `-inf`.
        value: &'static str,
    },
    /// NaN or infinity in a matrix.
    #[error("{what} holds {value} at row {row}, column {column}; it must be finite")]
    NonFiniteMatrix {
        /// Which matrix.
        what: &'static str,
        /// Row of the first bad entry.
        row: usize,
        /// Its column.
        column: usize,
        /// `NaN`, `inf` or `-inf`.
        value: &'static str,
    },
    /// A row entry too large for the exact grid.
    #[error(
        "input rows reach {magnitude:e} at step {step}, row {row}, column {column}; the exact Hessian takes \
             magnitudes up to {limit:e}: scale the rows down (a Hessian's scale changes no code)"
    )]
    RowTooLarge {
        /// The loop step.
        step: usize,
        /// Row within the step.
        row: u64,
        /// Column.
        column: usize,
        /// Largest magnitude found.
        magnitude: f64,
        /// Largest magnitude allowed.
        limit: f64,
    },
    /// The sum would leave the range of the exact grid.
    #[error(
        "the Hessian of step {step} would exceed {limit:e}, the range of its exact grid, after {rows} rows; \
             scale the rows down (a Hessian's scale changes no code) or use fewer rows"
    )]
    SumTooLarge {
        /// The loop step.
        step: usize,
        /// Rows seen so far in that step.
        rows: u64,
        /// Largest sum allowed.
        limit: f64,
    },
    /// A step that the accumulator was not made for.
    #[error("step {step} is not among this Hessian's steps {steps:?}")]
    UnknownStep {
        /// The step asked for.
        step: usize,
        /// The steps there are.
        steps: Vec<usize>,
    },
    /// Rows of another type than the first ones.
    #[error("rows of type {got} after rows of type {first}; one Hessian takes one row type, convert before")]
    RowType {
        /// The type of the first rows.
        first: &'static str,
        /// The type of these rows.
        got: &'static str,
    },
    /// An update after `finish`.
    #[error("the Hessian is finished; rows can no longer be added, make a new accumulator and merge it")]
    Finished,
    /// Any use after an interrupted update.
    #[error(
        "an update of this Hessian was interrupted half-way; its sums are not whole: make a new accumulator"
    )]
    Broken,
    /// A read before `finish`.
    #[error("the Hessian still buffers rows; call finish() before reading it")]
    NotFinished,
    /// A choice of steps from a Hessian that only holds their sum.
    #[error("this Hessian holds only the sum over its steps {steps:?}; asked for {got:?}: collect with per_step=True")]
    OnlySummed {
        /// The steps asked for.
        got: Vec<usize>,
        /// All steps.
        steps: Vec<usize>,
    },
    /// Two Hessians that cannot be merged.
    #[error("Hessians cannot be merged: {what} differ ({left} and {right})")]
    MergeMismatch {
        /// What differs.
        what: &'static str,
        /// Value on this side.
        left: String,
        /// Value on the other side.
        right: String,
    },
    /// A saved state that breaks its own format.
    #[error("the saved Hessian state is not valid: {0}; collect it again or restore the file")]
    BadState(String),
    /// The operating system refused a file.
    #[error("cannot read {path}: {reason}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// A file that ends before the rows do.
    #[error("{path} is truncated: rows need bytes {need_from}..{need_to}, the file has {have}; collect this shard again")]
    Truncated {
        /// The file.
        path: PathBuf,
        /// First byte wanted.
        need_from: u64,
        /// One past the last byte wanted.
        need_to: u64,
        /// Bytes in the file.
        have: u64,
    },
    /// `H` without any energy.
    #[error("the Hessian is all zeros: no input row had a value; check that the layer saw data")]
    ZeroHessian,
    /// Cholesky met a pivot that is not positive.
    #[error("the damped Hessian is not positive definite: pivot {value:e} at column {column} of {dim} \
             (damping {damping} of the mean diagonal, {precision}); raise the damping, use float64, or give more rows")]
    NotPositive {
        /// Column of `H` at which the factorisation stopped.
        column: usize,
        /// Number of columns.
        dim: usize,
        /// The pivot's value before its square root.
        value: f64,
        /// The damping that was asked for.
        damping: f64,
        /// `float32` or `float64`.
        precision: &'static str,
    },
    /// A scale that its storage type cannot hold.
    #[error("the scale {value:e} of row {row}, group {group} is {what} in {dtype}; use bfloat16 or float32 scales")]
    ScaleRange {
        /// Output row.
        row: usize,
        /// Group.
        group: usize,
        /// The scale before rounding.
        value: f64,
        /// `zero` or `infinite`.
        what: &'static str,
        /// The storage type.
        dtype: &'static str,
    },
    /// A number that does not fit the bits it is to be packed in.
    #[error(
        "code {value} at row {row}, column {column} does not fit {bits} bits with zero offset {zero_offset}"
    )]
    CodeRange {
        /// Row.
        row: usize,
        /// Column.
        column: usize,
        /// The code.
        value: i64,
        /// Bits.
        bits: u32,
        /// Offset added before packing.
        zero_offset: i64,
    },
    /// The eigenvalue library gave up in a way that it has no error for, for want of memory say.
    #[error("the eigenvalues of a {dim} x {dim} matrix could not be computed: {reason}")]
    EigenvalueLibrary {
        /// Number of columns.
        dim: usize,
        /// What it said last.
        reason: String,
    },
    /// An eigenvalue iteration that did not settle.
    #[error(
        "the eigenvalues of a {dim} x {dim} matrix did not converge; check the matrix for extreme scales"
    )]
    NoConvergence {
        /// Size of the matrix.
        dim: usize,
    },
    /// Threads could not be started.
    #[error("cannot start {threads} threads: {reason}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        reason: String,
    },
    /// Somebody asked the work to stop.
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    /// The class that a caller should see.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Self::Setting { .. }
            | Self::Shape { .. }
            | Self::TooLarge { .. }
            | Self::UnknownStep { .. }
            | Self::RowType { .. }
            | Self::Finished
            | Self::NotFinished
            | Self::Broken
            | Self::OnlySummed { .. }
            | Self::MergeMismatch { .. }
            | Self::CodeRange { .. }
            | Self::Threads { .. } => Kind::Config,
            Self::NonFiniteRow { .. } | Self::NonFiniteMatrix { .. } => Kind::NonFinite,
            Self::BadState(_) | Self::Io { .. } | Self::Truncated { .. } => Kind::Dump,
            Self::RowTooLarge { .. }
            | Self::SumTooLarge { .. }
            | Self::ZeroHessian
            | Self::NotPositive { .. }
            | Self::ScaleRange { .. }
            | Self::NoConvergence { .. }
            | Self::EigenvalueLibrary { .. } => Kind::Solve,
            Self::Interrupted => Kind::Interrupted,
        }
    }

    /// Shorthand for [`Error::Setting`].
    pub(crate) fn setting(name: &'static str, got: impl ToString, allowed: impl ToString) -> Self {
        Self::Setting { name, got: got.to_string(), allowed: allowed.to_string() }
    }

    /// Shorthand for [`Error::Shape`].
    pub(crate) fn shape(what: &'static str, expected: impl ToString, got: impl ToString) -> Self {
        Self::Shape { what, expected: expected.to_string(), got: got.to_string() }
    }
}

/// The name of a non-finite value.
pub(crate) fn name_of(value: f64) -> &'static str {
    if value.is_nan() {
        "NaN"
    } else if value > 0.0 {
        "inf"
    } else {
        "-inf"
    }
}
