// The form with the parameters of the open conversation.

import { element } from './dom.js';
import { PARAMETERS } from './store.js';

const MAX_STOPS = 16;

export class Settings {
  /** `changed(system, params)` is called with every change that is valid. */
  constructor(changed) {
    this.changed = changed;
    this.system = document.getElementById('p-system');
    this.stop = document.getElementById('p-stop');
    this.stopHelp = document.getElementById('stop-help');
    this.fields = PARAMETERS.map((parameter) => numberField(parameter));
    document.getElementById('numbers').append(...this.fields.map((field) => field.node));
    const form = document.getElementById('parameters');
    form.addEventListener('input', () => this.read());
    form.addEventListener('submit', (event) => event.preventDefault());
    document.getElementById('reset').addEventListener('click', () => {
      this.show({ system: '', params: {} });
      this.read();
    });
  }

  /** Shows the parameters of a conversation. */
  show({ system, params }) {
    this.system.value = system;
    this.stop.value = (params.stop ?? []).join('\n');
    for (const { parameter, input } of this.fields) input.value = params[parameter.name] ?? '';
    this.check();
  }

  read() {
    if (!this.check()) return;
    const params = {};
    for (const { parameter, input } of this.fields) if (input.value !== '') params[parameter.name] = Number(input.value);
    const stop = this.stops();
    if (stop.length) params.stop = stop;
    this.changed(this.system.value, params);
  }

  stops() {
    return this.stop.value.split('\n').filter((line) => line !== '');
  }

  /** Marks what is wrong, and returns whether nothing is. */
  check() {
    let valid = true;
    for (const { parameter, input, help } of this.fields) {
      const wrong = problemOf(input, parameter);
      mark(input, help, wrong, '');
      valid &&= !wrong;
    }
    const stops = this.stops().length > MAX_STOPS ? `At most ${MAX_STOPS}.` : '';
    mark(this.stop, this.stopHelp, stops, 'The answer ends before any of them.');
    return valid && !stops;
  }
}

function numberField(parameter) {
  const { name, label, step, whole } = parameter;
  const id = `p-${name}`;
  const help = element('small', { id: `${id}-help` });
  const input = element('input', {
    id, type: 'number', step: String(step), placeholder: 'default', inputmode: whole ? 'numeric' : 'decimal',
    'aria-describedby': help.id,
  });
  return { parameter, input, help, node: element('label', { class: 'field' }, element('span', {}, label), input, help) };
}

function problemOf(input, { min, max, whole }) {
  if (input.validity.badInput) return 'A number, please.';
  if (input.value === '') return '';
  const number = Number(input.value);
  if (whole && !Number.isInteger(number)) return 'A whole number.';
  if (number < min) return `At least ${min}.`;
  return number > max ? `At most ${max}.` : '';
}

function mark(input, help, wrong, otherwise) {
  input.setAttribute('aria-invalid', String(Boolean(wrong)));
  help.classList.toggle('wrong', Boolean(wrong));
  help.textContent = wrong || otherwise;
  help.hidden = !help.textContent;
}
