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
    /// The machine has not the memory.
    Memory,
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
        /// The allowed values.
        allowed: String,
    },
    /// Two arrays, or an array and a number, do not fit together.
    #[error("{what}: expected {expected}, got {got}")]
    Shape {
        /// The object with that shape.
        what: &'static str,
        /// The shape or length that was expected.
        expected: String,
        /// The shape or length that came.
        got: String,
    },
    /// A product of sizes does not fit in memory's address range.
    #[error("the size of {what} overflows: {detail}")]
    TooLarge {
        /// The object to allocate or address.
        what: &'static str,
        /// The numbers that were multiplied.
        detail: String,
    },
    /// The system has no memory to give.
    #[error(
        "no memory for {what}, {}: end other programs or take a machine with more memory; \
             --memory bounds what a run holds at once besides the model",
        in_units(*.bytes)
    )]
    OutOfMemory {
        /// The purpose of the memory.
        what: &'static str,
        /// The requested bytes.
        bytes: usize,
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
    /// Any use after an update that was interrupted or ran out of memory.
    #[error("an update of this Hessian stopped half-way; its sums are not whole: make a new accumulator")]
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
        /// The difference.
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
        /// The system's message.
        reason: String,
    },
    /// A file that the safetensors library refuses.
    #[error("{path}: not a whole safetensors file: {reason}; collect this file again or restore it")]
    NoSafetensors {
        /// The file.
        path: PathBuf,
        /// The library's message.
        reason: String,
    },
    /// A tensor that a file does not hold.
    #[error("{path}: no tensor {tensor:?}; the file is not the one that its index describes")]
    NoTensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
    },
    /// A tensor of another type or shape.
    #[error("{path}: tensor {tensor:?} is {got}; rows must be {expected}")]
    WrongTensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The expected type and shape.
        expected: String,
        /// The type and shape in the file.
        got: String,
    },
    /// Another refusal, of rows that came from a file.
    #[error("{path}, tensor {tensor:?}: {source}")]
    InTensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The refusal itself.
        source: Box<Error>,
    },
    /// `H` without any energy.
    #[error("the Hessian is all zeros: no input row had a value; check that the layer saw data")]
    ZeroHessian,
    /// A factor used with a Hessian other than its own.
    #[error("the Hessian was changed after it was factored; make a new factor of it")]
    ChangedHessian,
    /// Cholesky met a pivot that is not positive.
    #[error("the damped Hessian is not positive definite: pivot {value:e} at column {column} of {dim} \
             (damping {mu:e} on a diagonal entry of {diagonal:e}, {precision}); raise the damping, use float64, or \
             give more rows")]
    NotPositive {
        /// Column of `H` at which the factorisation stopped.
        column: usize,
        /// Number of columns.
        dim: usize,
        /// The pivot's value before its square root.
        value: f64,
        /// The entry of `H` on its diagonal.
        diagonal: f64,
        /// The damping added to it.
        mu: f64,
        /// `float32` or `float64`.
        precision: &'static str,
    },
    /// A scale that its storage type cannot hold.
    #[error("the scale {value:e} of row {row}, group {group} is infinite in {dtype}; use bfloat16 or float32 scales")]
    ScaleRange {
        /// Output row.
        row: usize,
        /// Group.
        group: usize,
        /// The scale before rounding.
        value: f64,
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
        /// The requested number of threads.
        threads: usize,
        /// The system's message.
        reason: String,
    },
    /// A runner is used by two threads at once.
    #[error("this runner computes for another thread; give each thread a runner of its own")]
    RunnerInUse,
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
            | Self::ChangedHessian
            | Self::RunnerInUse
            | Self::Threads { .. } => Kind::Config,
            Self::NonFiniteRow { .. } | Self::NonFiniteMatrix { .. } => Kind::NonFinite,
            Self::BadState(_)
            | Self::Io { .. }
            | Self::NoSafetensors { .. }
            | Self::NoTensor { .. }
            | Self::WrongTensor { .. } => Kind::Dump,
            Self::InTensor { source, .. } => source.kind(),
            Self::RowTooLarge { .. }
            | Self::SumTooLarge { .. }
            | Self::ZeroHessian
            | Self::NotPositive { .. }
            | Self::ScaleRange { .. }
            | Self::NoConvergence { .. } => Kind::Solve,
            Self::OutOfMemory { .. } => Kind::Memory,
            Self::Interrupted => Kind::Interrupted,
        }
    }

    /// The same with row and group, where it is about a scale.
    pub(crate) fn located(self, row: usize, group: usize) -> Self {
        match self {
            Self::ScaleRange { value, dtype, .. } => Self::ScaleRange { row, group, value, dtype },
            other => other,
        }
    }

    /// The same about the row of the whole weight, where it is about a row of a part.
    pub(crate) fn moved(self, place: impl Fn(usize) -> usize) -> Self {
        match self {
            Self::ScaleRange { row, group, .. } => self.located(place(row), group),
            Self::NonFiniteMatrix { what, row, column, value } => {
                Self::NonFiniteMatrix { what, row: place(row), column, value }
            }
            other => other,
        }
    }

    /// Shorthand for [`Error::Setting`].
    #[must_use]
    pub fn setting(name: &'static str, got: impl ToString, allowed: impl ToString) -> Self {
        Self::Setting { name, got: got.to_string(), allowed: allowed.to_string() }
    }

    /// Shorthand for [`Error::Shape`].
    #[must_use]
    pub fn shape(what: &'static str, expected: impl ToString, got: impl ToString) -> Self {
        Self::Shape { what, expected: expected.to_string(), got: got.to_string() }
    }
}

/// A number of bytes in the unit that fits.
fn in_units(bytes: usize) -> String {
    match bytes {
        0..0x10_0000 => format!("{bytes} bytes"),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
        _ => format!("{:.1} GiB", bytes as f64 / 1_073_741_824.0),
    }
}

/// The name of a non-finite value.
#[must_use]
pub fn name_of(value: f64) -> &'static str {
    if value.is_nan() {
        "NaN"
    } else if value > 0.0 {
        "inf"
    } else {
        "-inf"
    }
}
