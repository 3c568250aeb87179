// Numbers as people read them: as many digits as they can use, with the unit.

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat('en', { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const NOTHING = '–';

/** Returns a whole number: 7, 1,234, 56.7k, 8.9M. */
export function count(number) {
  if (number < 10_000) return whole.format(number);
  return number < 999_950 ? `${tenth.format(number / 1_000)}k` : `${tenth.format(number / 1_000_000)}M`;
}

/** Returns a number of something per second: small ones with a decimal. */
export function rate(number) {
  if (number === 0) return '0';
  if (number < 0.05) return '<0.1';
  return number < 9.95 ? tenth.format(number) : count(number);
}

/** Returns a duration: 4.2 ms, 42 ms, 420 ms, 4.2 s, 42 s. */
export function seconds(number) {
  if (number < 0.9995) {
    const milliseconds = number * 1_000;
    return `${milliseconds < 9.95 ? tenth.format(milliseconds) : whole.format(milliseconds)} ms`;
  }
  return `${number < 9.95 ? tenth.format(number) : whole.format(number)} s`;
}

/** Returns a share of one as a percentage. */
export function share(number) {
  const percent = number * 100;
  return `${percent > 0 && percent < 9.95 ? tenth.format(percent) : whole.format(percent)}%`;
}

/** Returns the time of day, here, of a number of Unix seconds. */
export function clock(time) {
  return new Date(time * 1_000).toLocaleTimeString('en-GB');
}

/** Returns the least round number that is not below: what an axis ends with. */
export function roundUp(number) {
  const power = 10 ** Math.floor(Math.log10(number));
  const step = [1, 2, 3, 4, 5, 6, 8, 10].find((each) => each * power >= number * (1 - 1e-9));
  return step * power;
}
