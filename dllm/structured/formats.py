"""JSON Schema's vocabulary: the standard's formats, and keywords that say nothing of values."""

ANNOTATIONS = {
    "$schema", "$id", "id", "$comment", "$defs", "definitions", "$anchor", "$dynamicAnchor",
    "$vocabulary", "title", "description", "default", "example", "examples", "deprecated",
    "readOnly", "writeOnly", "discriminator", "nullable", "strict", "propertyOrdering",
    "contentEncoding", "contentMediaType", "contentSchema", "xml", "externalDocs", "components",
}  # fmt: skip
LEAP = ("(?:(?:[0-9][1-9]|[1-9]0)(?:0[48]|[2468][048]|[13579][26])|00(?:0[48]|[2468][048]|"
        "[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)")  # fmt: skip
YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
MONTHS = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
DATE = f"(?:{YEAR}-(?:{MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP}-02-29)"
CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
TIME = f"{CLOCK}(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
A, X = "[A-Za-z0-9]", "[A-Za-z0-9-]"
# With two hyphens as third and fourth character, a label stands for another alphabet's.
LABEL, SHORT, BRIEF = (
    f"{A}(?:{X}{{0,2}}{A}|{X}(?:{A}{X}|-{A}){X}{{0,{most - 5}}}{A})?" for most in (63, 22, 9)
)
OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = rf"{OCTET}(?:\.{OCTET}){{3}}"
H = "[0-9A-Fa-f]"
HEX = f"{H}{{1,4}}"
IPV6 = "|".join([
    f"(?:{HEX}:){{7}}{HEX}", f"(?:{HEX}:){{6}}{IPV4}",
    *(f"(?:{HEX}(?::{HEX}){{{n - 1}}})?::(?:{HEX}(?::{HEX}){{0,{6 - n}}})?" if n
      else f"::(?:{HEX}(?::{HEX}){{0,6}})?" for n in range(7)),
])  # fmt: skip
ESCAPED = f"%{H}{{2}}"
PCHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{ESCAPED})"
AUTHORITY = (rf"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{ESCAPED})*@)?(?:[A-Za-z0-9._~!$&'()*+,;=-]|"
             rf"{ESCAPED})*(?::[0-9]*)?")  # fmt: skip
TAIL = rf"(?:\?(?:{PCHAR}|[/?])*)?(?:#(?:{PCHAR}|[/?])*)?"
PATH = rf"//{AUTHORITY}(?:/{PCHAR}*)*|/(?:{PCHAR}+(?:/{PCHAR}*)*)?"
URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{PATH}|{PCHAR}+(?:/{PCHAR}*)*){TAIL}"
SEGMENT = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{ESCAPED})+"  # without a colon
REFERENCE = rf"(?:{PATH}|{SEGMENT}(?:/{PCHAR}*)*)?{TAIL}"
DOMAIN = rf"(?:{BRIEF}\.)?{SHORT}\.(?:{BRIEF}\.)?[A-Za-z]{{2,18}}"
ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
DAYS = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
HOURS = "(?:[0-9]+S|[0-9]+M(?:[0-9]+S)?|[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?)"
POINTER = "(?:/(?:[ !#-.0-\\[\\]-}]|~[01])*)*"
NAME = r"\w+(?:\.\w+)*(?:\*|:[1-9][0-9]{0,2})?"
RANGE = r"\[\^?(?:0-9|A-Z|a-z|[A-Za-z0-9 _.,:;/+*?()$]|\\\\[dsw])+-?\]"
COUNT = r"(?:[*+?]|\{[0-9]{1,2},?\})?"
ONE = rf"(?:[A-Za-z0-9 _,:;/=@%&#'<>!-]|\.|\\\\[dDsSwW.*+?()[\]{{}}|^$/]|{RANGE}){COUNT}"
WAY = rf"(?:{ONE}|\((?:\?:)?(?:{ONE})*(?:\|(?:{ONE})*)*\){COUNT})*"
LENGTHS = {"email": 126, "hostname": 242}  # of the longest that are written
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": f"P(?:{DAYS}(?:T{HOURS})?|T{HOURS}|[0-9]+W)",
    "uuid": f"{H}{{8}}-({H}{{4}}-){{3}}{H}{{12}}",
    "email": rf"(?=.{{1,64}}@){ATOM}(?:\.{ATOM})*@{DOMAIN}",
    "ipv4": IPV4,
    "ipv6": IPV6,
    "hostname": rf"{LABEL}(?:\.{LABEL})?(?:\.{SHORT}){{0,5}}",
    "uri": URI,
    "uri-reference": f"(?:{URI}|{REFERENCE})",
    "json-pointer": POINTER,
    "relative-json-pointer": f"(?:0|[1-9]+0?)(?:#|{POINTER})",
    "regex": rf"\^?{WAY}(?:\|{WAY})*\$?",  # what Python and JavaScript read alike, in JSON
    "uri-template": rf"(?:{PCHAR}|[/?#]|\{{[+#./;?&]?{NAME}(?:,{NAME})*\}})*",
}
# As pydantic names them.
FORMATS |= {f"uuid{n}": f"{H}{{8}}-{H}{{4}}-{n}{H}{{3}}-[89abAB]{H}{{3}}-{H}{{12}}"
            for n in range(1, 9)}  # fmt: skip
# Of addresses in all alphabets those are written that need no others.
FORMATS |= {"iri": FORMATS["uri"], "iri-reference": FORMATS["uri-reference"],
            "idn-email": FORMATS["email"], "idn-hostname": FORMATS["hostname"]}  # fmt: skip
